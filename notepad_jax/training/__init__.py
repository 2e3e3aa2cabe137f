"""One training run, from its first step to its report; start with `train`."""
