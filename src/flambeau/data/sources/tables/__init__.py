"""Tables of labelled images: Parquet and Arrow files, as Hugging Face writes them."""
