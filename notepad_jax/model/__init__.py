"""The policy: a decoder-only transformer whose parameters are a plain tree at every boundary."""
