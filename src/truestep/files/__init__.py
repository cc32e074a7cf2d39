"""Reading and writing of files.

whole             atomic writes (temporary name, fsync, rename), and JSON Lines files
tensors           safetensors files, written and read in pieces, with progress reports
disks             disk errors with the file, the disk and what to do
bounded           size limits for untrusted lines, JSON and small files
"""
