"""The little language of the quick start: vocabulary, documents, lessons."""
