"""From options to parts. The one place that reads the configuration's values into the rooms that know no config."""
