"""Documents that clients uploaded, or may name by address, as text that is read from disk."""
