"""Generator of the documentation site: `make docs`.

`python -m docs.site` writes the source of the site to `build/docs`: the pages of `docs/`, and the
reference, which is made from docstrings and from the help of the command. Zensical makes HTML of
it, as `mkdocs.yml` says. `python -m docs.site.check` then compares the result with the code.
"""
