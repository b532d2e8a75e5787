"""The wing that decides: requests, scheduler, KV blocks on paper. Pure Python, no torch."""
