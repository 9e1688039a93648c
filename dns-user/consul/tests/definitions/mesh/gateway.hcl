/* Registered by hand, with an address for each side. */
services {
  id   = "edge-1"
  name = "edge"
  kind = "mesh-gateway"
  port = 8443
  tagged_addresses { lan { address = "10.40.0.7" port = 8443 } wan { address = "192.0.2.7" port = 443 } }
  checks = [
    { name = "Listening", tcp = "10.40.0.7:8443", interval = "10s", status = "passing" },
  ]
}
services {
  name    = "orders"
  port    = 7000
  weights { passing = 10 warning = 1 }
  connect { native = true }
}
// The agent's own settings are in the same folder.
ports { grpc = 8502, https = -1 }
connect { enabled = true ca_provider = "consul" }
config_entries { bootstrap = [ { kind = "proxy-defaults" name = "global" config { protocol = "http" } } ] }
