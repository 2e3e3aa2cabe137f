"""The synthetic language of the quick start: vocabulary, documents, lessons."""
