"""Workers: any number of processes that fill one recording, part by part."""
