"""What is told about requests: Prometheus metrics, and the log."""
