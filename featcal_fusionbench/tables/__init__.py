"""The paper's tables: results of a sweep's cells, published numbers, tables and figures of both."""
