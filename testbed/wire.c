/*
 * wire: a network cable with a delay, in user space, for machines whose kernel has no netem.
 *
 *     wire NAMESPACE_A INTERFACE_A NAMESPACE_B INTERFACE_B DELAY_US
 *
 * Makes INTERFACE_A in the network namespace NAMESPACE_A (a file in /run/netns) and INTERFACE_B in NAMESPACE_B, and
 * carries frames both ways, each DELAY_US microseconds late. Prints "up" when both are there, and lives until killed;
 * the interfaces go with it.
 *
 * For each direction one thread reads frames and puts them into a ring, with the time at which they are due, and one
 * takes them out and writes them then. A full ring drops frames, as a switch does. Frames are read whole with their
 * offload header (TCP segments of up to 64 KiB), else reading frames of 1500 bytes would limit it to a few 100 Mbit/s.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { RING = 2048, MOST_BYTES = 66000 };

struct frame {
    struct timespec due;
    ssize_t length;
    char bytes[MOST_BYTES];
};

struct direction {
    int in, out;
    struct frame *ring;
    unsigned head, tail; /* frames put in and taken out so far */
    pthread_mutex_t lock;
    pthread_cond_t filled;
};

static long delay_us;

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static int make_tap(const char *namespace, const char *interface)
{
    char path[256];
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};

    snprintf(path, sizeof path, "/run/netns/%s", namespace);
    int there = open(path, O_RDONLY | O_CLOEXEC);
    if (there < 0 || setns(there, CLONE_NEWNET) != 0)
        fail(path);
    close(there);
    int tap = open("/dev/net/tun", O_RDWR | O_CLOEXEC);
    if (tap < 0)
        fail("/dev/net/tun");
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", interface);
    if (ioctl(tap, TUNSETIFF, &request) != 0)
        fail(interface);
    if (ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6) != 0)
        fail("TUNSETOFFLOAD");
    return tap;
}

static void *fill(void *argument)
{
    struct direction *way = argument;
    static _Thread_local char bytes[MOST_BYTES];

    for (;;) {
        ssize_t length = read(way->in, bytes, sizeof bytes);
        if (length <= 0) { /* the interface is down */
            usleep(1000);
            continue;
        }
        struct timespec due;
        clock_gettime(CLOCK_MONOTONIC, &due);
        due.tv_nsec += delay_us * 1000;
        due.tv_sec += due.tv_nsec / 1000000000;
        due.tv_nsec %= 1000000000;
        pthread_mutex_lock(&way->lock);
        if (way->head - way->tail < RING) {
            struct frame *frame = &way->ring[way->head % RING];
            frame->due = due;
            frame->length = length;
            memcpy(frame->bytes, bytes, (size_t)length);
            way->head++;
            pthread_cond_signal(&way->filled);
        }
        pthread_mutex_unlock(&way->lock);
    }
    return NULL;
}

static void *drain(void *argument)
{
    struct direction *way = argument;

    for (;;) {
        pthread_mutex_lock(&way->lock);
        while (way->head == way->tail)
            pthread_cond_wait(&way->filled, &way->lock);
        pthread_mutex_unlock(&way->lock);
        /* Only this thread moves the tail, so the frame stays ours without the lock. */
        const struct frame *frame = &way->ring[way->tail % RING];
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &frame->due, NULL);
        if (write(way->out, frame->bytes, (size_t)frame->length) < 0) {
            /* The interface is down: the frame is lost, as on a cable that is cut. */
        }
        pthread_mutex_lock(&way->lock);
        way->tail++;
        pthread_mutex_unlock(&way->lock);
    }
    return NULL;
}

int main(int count, char **words)
{
    if (count != 6) {
        fprintf(stderr, "usage: wire NAMESPACE_A INTERFACE_A NAMESPACE_B INTERFACE_B DELAY_US\n");
        return 1;
    }
    delay_us = atol(words[5]);
    int a = make_tap(words[1], words[2]);
    int b = make_tap(words[3], words[4]);
    static struct direction ways[2];
    ways[0].in = ways[1].out = a;
    ways[0].out = ways[1].in = b;
    for (int i = 0; i < 2; i++) {
        pthread_t thread;
        ways[i].ring = calloc(RING, sizeof *ways[i].ring);
        if (ways[i].ring == NULL)
            fail("memory");
        pthread_mutex_init(&ways[i].lock, NULL);
        pthread_cond_init(&ways[i].filled, NULL);
        if (pthread_create(&thread, NULL, fill, &ways[i]) != 0 || pthread_create(&thread, NULL, drain, &ways[i]) != 0)
            fail("thread");
    }
    puts("up");
    fflush(stdout);
    for (;;)
        pause();
}
