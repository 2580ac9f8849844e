"""The HTTP API: connections, bodies, endpoints."""
