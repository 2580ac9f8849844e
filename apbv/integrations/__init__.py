"""Connectors for serving engines that decode from KV prefilled by apbv."""
