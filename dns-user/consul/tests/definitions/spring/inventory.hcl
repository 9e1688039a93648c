{
  "service": {
    "ID": "inventory-8081",
    "Name": "inventory",
    "Tags": ["secure=false", "contextPath=/"],
    "Address": "10.40.4.2",
    "Meta": {"secure": "false", "gRPC_port": "9081"},
    "Port": 8081,
    "Check": {
      "CheckID": "service:inventory-8081", "Interval": "10s", "HTTP": "http://10.40.4.2:8081/actuator/health",
      "Header": {"Accept": ["application/json"]}, "DeregisterCriticalServiceAfter": "1m"
    }
  }
}
