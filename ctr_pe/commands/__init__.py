"""The commands of ctr-pe, one file each."""
