"""YAML that ships with the package: model and data set configurations in FuxiCTR's dialect, recipes for building data sets."""
