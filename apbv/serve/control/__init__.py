"""From a request that was read to its answers: the queue, the hosts, and what they send back."""
