"""The paper's tables: results of cells and published numbers, and documents and figures of both."""
