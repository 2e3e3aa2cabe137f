"""From a config to the parts of a run: found, changed, checked, built; programs begin here."""
