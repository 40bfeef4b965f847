"""Charts as SVG, for the pages of convert and the plots of runtime."""
