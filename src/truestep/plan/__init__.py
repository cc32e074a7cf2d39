"""What a configuration needs of each rank's memory, found without a GPU and without reading a weight."""
