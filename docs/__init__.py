"""Pages of the documentation; `docs.site` makes a site of them."""
