"""The files of requests: where they may come from."""
