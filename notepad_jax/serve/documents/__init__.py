"""What clients sent, or may name by address, as text that is read from disk."""
