"""`truestep init`: a directory with a task of one's own that runs as it is, to be changed from there."""
