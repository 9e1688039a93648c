telemetry { prometheus_retention_time = "60s" disable_hostname = true }
service = { name = "prometheus", port = "9090", check = { args = ["/bin/sh", "-c", "exit \"$?\""], interval = "30s" } }
