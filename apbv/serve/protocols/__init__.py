"""The fields of requests, read into orders; and the replies."""
