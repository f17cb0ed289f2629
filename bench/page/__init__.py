"""A report as data, and how it is rendered: pages, tables, numbers as text, the style of plots."""
