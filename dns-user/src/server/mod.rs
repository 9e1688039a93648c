//! Sockets and the router: UDP, TCP, and who answers which name.
