"""YAML that ships with the package, in FuxiCTR's dialect where it has one: models, data sets, recipes."""
