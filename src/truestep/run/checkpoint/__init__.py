"""Checkpoints. A checkpoint holds everything the next step depends on, and is complete or absent.

saves             saves by all ranks in the background, completed by the first rank
staging           copies of weights and optimizer state in host memory, made before an update changes them
store             the directory of checkpoints: written under another name, synced, renamed
memory            checkpoints in host memory, which keepers hold
checksums         the manifest of checksums, which reveals a flipped byte when a checkpoint is read
background        a thread for one piece of work
"""
