"""Readers of FASTA, FASTQ, GenBank, GFF, VCF and tables, one record at a time."""
