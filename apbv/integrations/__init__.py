"""Connects serving engines that continue from KV that apbv prefilled."""
