"""Makes the parts of a run. Only here are a configuration's values handed to parts that know no configuration."""
