"""The wing that computes: target model, KV tensors, sampling, verification, proposer calls."""
