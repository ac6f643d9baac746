"""All that is there because FuxiCTR is as it is: imports, CSV data, feature maps, experiments."""
