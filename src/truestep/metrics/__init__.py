"""Values that carry their reduction, the sinks they go to, and the report."""
