/* Passes frames between pairs of TAP devices, each after a fixed delay.
 *
 *   relay DELAY_US DEVICE_A DEVICE_B [DEVICE_A DEVICE_B ...]
 *
 * Creates the devices, prints "ready", and runs until it is killed. Frames that come faster than
 * they leave are dropped when a queue is full, as a router would. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { QUEUE = 16384, BATCH = 64, LARGEST = 70000, PORTS = 64 };

struct frame {
    int64_t due;
    int length;
    char *bytes;
};

struct port {
    int handle;
    struct frame queue[QUEUE]; /* read from this port, to be written to its peer */
    unsigned head, tail;
};

static struct port *ports[PORTS];

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int open_tap(const char *name) {
    int handle = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    struct ifreq request;
    memset(&request, 0, sizeof request);
    /* Offloads let whole TCP segments pass in one piece: far fewer frames. */
    request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    if (handle < 0 || ioctl(handle, TUNSETIFF, &request) < 0) {
        perror(name);
        exit(1);
    }
    ioctl(handle, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6);
    return handle;
}

static int64_t deliver(struct port *from, int to) {
    while (from->head != from->tail) {
        struct frame *f = &from->queue[from->head % QUEUE];
        if (f->due > now_ns()) return f->due;
        if (write(to, f->bytes, f->length) < 0) return now_ns() + 50000;
        free(f->bytes);
        from->head++;
    }
    return -1;
}

static void receive(struct port *from, int64_t delay) {
    static char buffer[LARGEST];
    for (int n = 0; n < BATCH; n++) {
        int length = read(from->handle, buffer, sizeof buffer);
        if (length <= 0) return;
        if (from->tail - from->head >= QUEUE) continue;
        struct frame *f = &from->queue[from->tail++ % QUEUE];
        f->due = now_ns() + delay;
        f->length = length;
        f->bytes = malloc(length);
        memcpy(f->bytes, buffer, length);
    }
}

int main(int count, char **words) {
    int64_t delay = atoll(words[1]) * 1000;
    int n = count - 2;
    prctl(PR_SET_TIMERSLACK, 1000);
    prctl(PR_SET_PDEATHSIG, 9);
    for (int i = 0; i < n; i++) {
        ports[i] = calloc(1, sizeof(struct port));
        ports[i]->handle = open_tap(words[2 + i]);
    }
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        struct pollfd polls[PORTS];
        int64_t next = -1;
        for (int i = 0; i < n; i++) {
            int64_t due = deliver(ports[i], ports[i ^ 1]->handle);
            if (due >= 0 && (next < 0 || due < next)) next = due;
            polls[i] = (struct pollfd){.fd = ports[i]->handle, .events = POLLIN};
        }
        struct timespec wait_for, *timeout = NULL;
        if (next >= 0) {
            int64_t left = next - now_ns();
            if (left < 0) left = 0;
            wait_for = (struct timespec){left / 1000000000LL, left % 1000000000LL};
            timeout = &wait_for;
        }
        ppoll(polls, n, timeout, NULL);
        for (int i = 0; i < n; i++)
            if (polls[i].revents & POLLIN) receive(ports[i], delay);
    }
}
