// A page that is not there yet is asked for again, with the place in it that was named.
setTimeout(() => location.reload(), 2000);
