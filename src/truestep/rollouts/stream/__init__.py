"""Documents that are sent while the run goes on: on a Redis stream, or as files in a watched directory."""
