"""Serving engines that go on from what apbv prefilled."""
