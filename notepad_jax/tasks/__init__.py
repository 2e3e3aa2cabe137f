"""Where questions come from (records, synthetic) and how answers are judged (scoring)."""
