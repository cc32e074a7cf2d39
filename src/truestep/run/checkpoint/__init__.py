"""A checkpoint holds everything the next step depends on, and is complete or absent.

saves             all ranks write their parts in the background; the first one completes the checkpoint
staging           a part is copied to host memory before an update changes it
store             the directory: written under another name, synced, renamed
checksums         the manifest; a flipped byte is found when the checkpoint is read
background        a thread for one piece of work
"""
