"""What every room uses: errors, files, plugins, processes."""
