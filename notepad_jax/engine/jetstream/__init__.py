"""Our engine behind JetStream: its verbs (`engine`), and its orchestrator and server (`server`)."""
