"""History of runs: a folder of Parquet files, change points of its series, and their verdict."""
