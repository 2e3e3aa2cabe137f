"""Our engine behind JetStream: its verbs (`engine`), its orchestrator and gRPC server (`server`)."""
