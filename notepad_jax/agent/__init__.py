"""The agent: reads a document chunk by chunk, keeps a bounded memory, answers from it."""
