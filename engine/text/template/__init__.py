"""Chat templates: from messages to token ids, through a sandbox that limits what a template can do."""
