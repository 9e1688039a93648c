# A service behind a sidecar, with two upstreams.
service {
  name = "web", port = 8080
  tags = ["v2", "canary-${ENVIRONMENT}",]
  meta { version = "2.3" "team.name" = "shop" }
  connect { sidecar_service { proxy { upstreams = [
    { destination_name = "db", local_bind_port = 9191 },
    { destination_name = "cache" local_bind_port = 9192 }
  ] } } }
  check = { id = "web-http", http = "http://127.0.0.1:8080/health", interval = "10s", timeout = "1s" }
}
