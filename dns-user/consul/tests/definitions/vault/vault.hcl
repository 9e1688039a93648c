acl { enabled = true, tokens { agent = "00000000-0000-0000-0000-000000000000" } }
service {
  id      = "vault:10.40.2.5:8200"
  name    = "vault"
  tags    = ["active", "initialized"]
  address = "10.40.2.5"
  port    = 8200
  check {
    id     = "vault:10.40.2.5:8200:vault-sealed-check"
    name   = "Vault Sealed Status"
    notes  = <<-EOT
      Healthy while Vault is unsealed;
      see {{ runbook }}.
      EOT
    ttl    = "15s"
    status = "passing"
  }
}
service { id = "vault:10.40.2.6:8200" name = "vault" tags = ["standby"] address = "10.40.2.6" port = 8200 }
check { id = "sealed" name = "Sealed" ttl = "15s" service_id = "vault:10.40.2.6:8200" status = "warning" }
