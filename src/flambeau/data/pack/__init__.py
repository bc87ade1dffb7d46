"""Packed files: conversion between formats, verification of every record, and salvage of damaged files."""
