"""The one room that knows FuxiCTR: its imports, private attributes, feature maps, loaders and file forms."""

from ctr_pe.fuxictr.imports import import_later

import_later()
